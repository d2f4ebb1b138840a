"""The command line `tensorc`."""
