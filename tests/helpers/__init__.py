"""What several folders of tests use: programs, a CUDA driver that is played, proofs."""
