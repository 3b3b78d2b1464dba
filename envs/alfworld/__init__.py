"""Household text games in the manner of ALFWorld: an exact engine in pure Python, a game generator, and experts.

The engine prints the same text as TextWorld's PDDL engine does on the same game, to the letter, some thousand times
faster. Games come from the generator, from a compact JSONL file, or from a folder in the official layout.
"""
