"""Writes the JSON of `benchmarks.compare` as Markdown."""

from collections.abc import Iterator
from typing import Any

from examples.studies.report import plain

Section = dict[str, Any]

_HEADER = """\
# Beside other optimizers

This page compares the time and memory of updates and of whole training steps with those of Optax's own optimizers.

`python -m benchmarks.compare`: {host}; {versions}; float32. Every table's rows ran in turns in one process, and a
ratio is the median over rounds (quartiles in brackets) of a row's time in units of the first row's in the same round.
Update: gradients to new parameters, parameters and state donated. Step: loss, gradient and update as one compiled
function. Peak: arguments, results that do not reuse them and scratch memory of the compiled update, in MB and in units
of `optax.adamw`'s{counted}. Compile: tracing, lowering and compiling the update.

All Muons have the same matrices: the kernels of attention and MLP; Adam takes embeddings, head, norms, biases.
`optax.contrib.muon` is given each attention kernel as one matrix of (d, heads · d_head), as it is commonly used; "per
head" as `heads` matrices of (d, d_head). `ddc_muon` works per head on what a rotation gauge binds.{products}
"""

_ADAMW = "quotient(optax.adamw)"
_TITLES = {"orthogonalisers": "Orthogonalisers alone", "compile": "Compile time by depth", "peers": "PyTorch peers"}


def page(result: Section) -> str:
    """The whole Markdown page of a result."""
    sections = result["sections"]
    accelerated = result["device"] != "cpu"
    head = _HEADER.format(
        host=result["host"],
        versions=", ".join(f"{name} {number}" for name, number in result["versions"].items()),
        counted="; in brackets by the device's own count"
        if accelerated
        else ". In brackets, from jaxlib 0.9.1 on, the same where XLA's operations are ordered to hold least "
        '(`jax.jit(..., compiler_options={"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"})`): by '
        "default its CPU backend starts early what may run side by side",
        products=" Products of `optax.contrib.muon` are at the device's default precision, ours in float32."
        if accelerated
        else "",
    )
    tables = {"orthogonalisers": _orthogonalisers, "compile": _compile, "peers": _peers}
    order = [name for name in sections if name not in tables] + [name for name in tables if name in sections]
    paragraphs = (text.replace("\n", " ") for text in head.rstrip().split("\n\n"))
    parts = ["\n\n".join(paragraphs) + "\n", *_targets(sections, accelerated)]
    for name in order:
        parts += [f"\n## {_TITLES.get(name, name)}\n", *tables.get(name, _size)(sections[name])]
    return "\n".join(parts).rstrip() + "\n"


def _table(columns: str, rows: list[list[str]]) -> str:
    return plain([columns.split(", "), *rows]) + "\n"


def _number(x: float | None) -> str:
    """A number with three digits, or a dash for None."""
    if x is None:
        return "–"
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def _ratio(x: list[float] | None) -> str:
    return "–" if x is None else f"{_number(x[1])} ({_number(x[0])}–{_number(x[2])})"


def _adamw_peak(section: Section) -> Any:
    return section.get("blocks", {}).get("adam", {}).get("optax.adamw", {}).get("peak_mb")


def _size(section: Section) -> Iterator[str]:
    step, adamw = section.get("step"), _adamw_peak(section)
    text = f"{section['about']}; {section['parameters'] / 1e6:.1f} M parameters, {section['parameters_mb']:.0f} MB."
    if step:
        text += f" Step: batch {step['batch']} × {step['length']}, {step['repeats']} rounds."
    yield f"{text} Update: {section['repeats']} rounds.\n"
    for block in section["blocks"].values():
        rows = []
        for name, r in block.items():
            other = r.get("device_peak_mb", r.get("least_peak_mb"))
            counted = "" if other is None else f" ({_number(other)})"
            least = f" ({_number(r['least_peak_mb'] / adamw)})" if adamw and "least_peak_mb" in r else ""
            rows.append([name, _number(r["ms"]), _ratio(r["ratio"]), _number(r.get("step_ms")),
                         _ratio(r.get("step_ratio")), _number(r["peak_mb"]) + counted,
                         _number(r["peak_mb"] / adamw if adamw else None) + least, _number(r["state_mb"]),
                         _number(r["compile_s"])])
        yield _table("optimizer, update ms, ratio, step ms, ratio, peak MB, of adamw's, state MB, compile s", rows)


def _orthogonalisers(section: Section) -> Iterator[str]:
    yield (
        "The rows of DDC's Table 8 on the attention kernels: momentum and orthogonaliser alone, per head but for the "
        "first. A rotation gauge is `scale_by_scaled_polar`, which projects the step, in eigenbases that stay fresh or "
        f"are computed again in every step. {section['repeats']} rounds.\n"
    )
    rows = [[name, _number(r["ms"]), _ratio(r["ratio"]), _ratio(r["of_polar"]), f"{r['beyond_polar_ms']:+.1f}",
             _number(r["peak_mb"]), _number(r["compile_s"])] for name, r in section["blocks"]["rows"].items()]
    yield _table("row, ms, of plain Muon's, of the scaled polar's, ms beyond it, peak MB, compile s", rows)


def _compile(section: Section) -> Iterator[str]:
    depths = section["depths"]
    yield (
        f"Unrolled layers of one shape (d = {section['width']}, the toy's architecture); seconds to trace + lower + "
        "compile an update, from nothing. Ratio: of the last depth's total to the first's.\n"
    )
    rows = [[name, *(" + ".join(map(_number, seconds)) for seconds in r["seconds"]), _number(r["ratio"])]
            for name, r in section["blocks"]["rows"].items()]
    yield _table(", ".join(["optimizer", *(f"{n} layers" for n in depths), "ratio"]), rows)


def _peers(section: Section) -> Iterator[str]:
    if "absent" in section:
        yield f"Left out: {section['absent']}.\n"
        return
    versions = ", ".join(f"{name} {number}" for name, number in section["versions"].items())
    texts = {
        "muon": "The attention kernels. HeavyBall's products are bfloat16 and compiled by `torch.compile`, the others "
        "float32; its compile time is that of its first two steps.",
        "lora": f"LoRA factors of rank {section['rank']} of {section['pairs']} matrices; PyTorch's rows run eagerly.",
    }
    yield f"{versions}, CPU, as many threads as cores. {section['repeats']} rounds.\n"
    for name, block in section["blocks"].items():
        yield texts[name] + "\n"
        rows = [[n, _number(r["ms"]), _ratio(r["ratio"]), _number(r["state_mb"]), _number(r["compile_s"])]
                for n, r in block.items()]
        yield _table("optimizer, update ms, ratio, state MB, compile s", rows)


def _targets(sections: Section, accelerated: bool) -> Iterator[str]:
    """Compares the limits that the project sets itself with what was measured."""
    rows: list[tuple[str, float, float]] = []
    for name, section in sections.items():
        blocks, adamw = section.get("blocks", {}), _adamw_peak(section)
        updates = {"ddc_muon": 0.5 if accelerated else 0.15, "quotient_muon": 0.15} if name == "attention" else {}
        updates = {"ddc_muon": 0.6, "quotient_muon": 0.35} if name == "gpt2" else updates
        for block, optimizer, column, what, limit in (
            ("muon", "ddc_muon", "ratio", "`ddc_muon`'s update, of `optax.contrib.muon`'s", updates.get("ddc_muon")),
            ("adam", _ADAMW, "ratio", f"`{_ADAMW}`'s update, of `optax.adamw`'s", 4.0),
            ("adam", _ADAMW, "peak_mb", "its peak", 1.25),
            ("muon", "quotient_muon", "ratio", "`quotient_muon`'s update, of `optax.contrib.muon`'s",
             updates.get("quotient_muon")),
            ("muon", "ddc_muon", "step_ratio", "`ddc_muon`'s step, of `optax.contrib.muon`'s", 1.0),
            ("adam", "ddc_adamw", "ratio", "`ddc_adamw`'s update, of `optax.adamw`'s", 6.0),
            ("adam", "ddc_adamw", "peak_mb", "`ddc_adamw`'s peak, of `optax.adamw`'s", 1.35),
            ("muon", "ddc_muon", "peak_mb", "`ddc_muon`'s peak, of `optax.adamw`'s", 1.25),
        ):
            found = blocks.get(block, {}).get(optimizer, {}).get(column)
            if limit and found and (adamw or column != "peak_mb"):
                rows.append((f"{name}: {what}", limit, found / adamw if column == "peak_mb" else found[1]))
    deep = sections.get("compile", {})
    kept = deep.get("blocks", {}).get("rows", {})
    if {_ADAMW, "optax.contrib.muon"} <= set(kept):
        ours, plain = (sum(kept[n]["seconds"][0]) for n in (_ADAMW, "optax.contrib.muon"))
        rows.append((f"`{_ADAMW}`'s compile time at {deep['depths'][0]} layers, of `optax.contrib.muon`'s", 1.5,
                     ours / plain))
    if row := kept.get("ddc_adamw"):
        first, last = deep["depths"][0], deep["depths"][-1]
        rows.append((f"`ddc_adamw`'s compile time at {last} layers, of that at {first}", 3.0, row["ratio"]))
    if rows:
        shown = [[what, f"{limit:g}", f"{x:.2f}", "" if x <= limit else "**missed**"] for what, limit, x in rows]
        yield _table("held to, at most, measured, ", shown)
