"""Tests that `make test` leaves to `make test-all`, and why: a pattern of test ids, as `fnmatch` reads it, and a reason.

A test is quick where it is the only one that would notice: one net, one precision, one optimizer of a kind. What is
minutes by nature is marked where it stands.
"""

OTHER_PRECISION = "the same promise in the other precision"
OTHER_NET = "the same promise on another net or another row of a register"
OTHER_OPTIMIZER = "the same promise around another optimizer"
LONG = "long for what it adds to the quick tests beside it"

SLOW: dict[str, str] = {
    "test_slice.py::test_twins_under_adamw[[]gpt-float32]": OTHER_PRECISION,
    "test_slice.py::test_twins_under_adamw[[]llama-float64]": OTHER_PRECISION,
    "test_slice.py::test_unpinned_optimizers_take_the_steps_that_they_take_alone[[]contrib.muon-True]": OTHER_OPTIMIZER,
    "test_slice.py::test_a_rate_ahead_of_the_wrapper_is_one_inside": LONG,
    "test_slice.py::test_seeds_may_be_mapped_over": LONG,
    "test_slice.py::test_updates_can_be_differentiated_in_reverse": LONG,
    "test_slice.py::test_gradients_of_any_size_leave_what_adamw_leaves[[]1e+25]": OTHER_NET,
    "test_slice.py::test_gradients_of_any_size_leave_what_adamw_leaves[[]inf]": OTHER_NET,
    "test_ddc.py::test_twins_of_every_mode[[]gpt-float64-per_head_matrix]": OTHER_OPTIMIZER,
    "test_ddc.py::test_twins_of_every_mode[[]gpt-float64-refreshed]": OTHER_OPTIMIZER,
    "test_ddc.py::test_the_size_of_the_loss_changes_nothing": "the slice's test of the same promise is quick",
    "test_ddc.py::test_tangents_are_horizontal[[]head_rotation*]": OTHER_NET,
    "test_ddc.py::test_odd_starts[[]*-zero_outputs]": OTHER_NET,
    "test_ddc.py::test_degenerate_heads[[]*-float32-*]": OTHER_PRECISION,
    "test_quotient.py::test_whole_models_are_one_function[[]*": "the slice's tests of twins are quick",
    "test_quotient.py::test_lora_starts_from_zero[[]quotient_muon-*]": OTHER_OPTIMIZER,
    "test_quotient.py::test_lora_starts_from_zero[[]*-2]": OTHER_NET,
    "test_quotient.py::test_complex_planes_stay_one_function": LONG,
    "test_quotient.py::test_products_stay_together_in_float32[[]quotient_muon]": OTHER_OPTIMIZER,
    "test_quotient.py::test_a_target_of_fewer_ranks_in_float32[[]*]": LONG,
    "test_quotient.py::test_scalar_factors_take_one_represented_step[[]*-rescale]": OTHER_NET,
    "test_quotient.py::test_blocks_may_be_listed_in_any_order": LONG,
    "test_transport.py::test_a_quotient_state_goes_on_where_its_twin_does[[]quotient_muon]": OTHER_OPTIMIZER,
    "test_conformance.py::test_three_donated_steps_in_float32[[]*]": "in bfloat16 they are quick",
    "test_models.py::test_linear_gauges_keep_the_loss[[]llama/gqa]": OTHER_NET,
    "test_studies.py::test_a_tiny_study_leaves_json_figure_and_table[[]sparse_parity]": OTHER_NET,
    "test_studies.py::test_a_tiny_study_leaves_json_figure_and_table[[]row_shift]": OTHER_NET,
    "test_studies.py::test_a_tiny_study_leaves_json_figure_and_table[[]layernorm_scale]": OTHER_NET,
    "test_studies.py::test_a_tiny_study_leaves_json_figure_and_table[[]diagonal_network]": OTHER_NET,
    "test_studies.py::test_without_rounding_the_shift_gauge_changes_no_loss": LONG,
    "test_benchmarks.py::test_figures_of_another_machine_are_not_mixed_in": LONG,
    "test_benchmarks.py::test_muon_sees_whole_kernels_and_heads": LONG,
    "test_benchmarks.py::test_table_8_has_rows_with_and_without_the_gauge": LONG,
    "test_opposite_gram.py::test_the_benchmark_says_what_it_measured": LONG,
    "test_fix.py::test_a_quotient_optimizer_does_not_notice[[]head_linear*": OTHER_NET,
    "test_fix.py::test_the_function_stays_and_the_imbalance_goes[[]gpt-float32]": OTHER_PRECISION,
    "test_frameworks.py::test_a_state_from_orbax_takes_the_same_next_step[[]adam]": OTHER_OPTIMIZER,
    "test_frameworks.py::test_a_state_from_orbax_takes_the_same_next_step[[]sgd]": OTHER_OPTIMIZER,
    "measure/test_sensitivity.py::test_quotient_optimizers_see_nothing[[]quotient_muon]": OTHER_OPTIMIZER,
    "measure/test_sensitivity.py::test_spectral_and_linear_steps_do_not_see_rotations[[]*muon*]": OTHER_OPTIMIZER,
    "test_sharding.py::test_eight_devices_equal_one[[]*]": "a mesh of eight devices is in the quick test beside it",
    "test_examples.py::test_self_tests_resume_and_tell_readings_of_the_reference_apart": LONG,
    "gauges/test_by_action.py::test_twins_under_a_list_with_a_users_gauge_are_one_function[[]*-float32]": OTHER_PRECISION,
    "gauges/test_by_action.py::test_twins_under_a_list_with_a_users_gauge_are_one_function[[]chain-*]": OTHER_OPTIMIZER,
    "gauges/test_by_action.py::test_twins_under_a_list_with_a_users_gauge_are_one_function[[]lion-*]": OTHER_OPTIMIZER,
    "gauges/test_by_action.py::test_twins_under_a_list_with_a_users_gauge_are_one_function[[]ddc_muon-*]": OTHER_OPTIMIZER,
}
