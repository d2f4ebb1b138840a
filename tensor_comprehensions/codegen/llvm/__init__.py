"""Loop programs in, LLVM assembly out."""
