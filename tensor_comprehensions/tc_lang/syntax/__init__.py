"""The syntax of the language: text to trees, and trees to text."""
