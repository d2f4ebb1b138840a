"""LLVM assembly in, functions of this process out, and their launches."""
