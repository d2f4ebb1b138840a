"""The language: text in, checked `Function`s out; a `BoundFunction` is one with every size known.

Always holds: nothing here knows of targets, schedules or torch kernels; every mistake is a `TCError` with its place.
"""
