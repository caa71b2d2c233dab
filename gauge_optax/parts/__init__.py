"""What a gauge is on a tree: parts, which add (`Constant`), multiply (`Size`) or rotate (`Turn`). One family per file.
"""
