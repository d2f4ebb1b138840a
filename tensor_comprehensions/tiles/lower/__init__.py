"""Tile programs to loop programs: the rules that decompose specs to instructions."""
