"""Measurements on this machine. `meshwright.records` has their files, `meshwright.fitting` the calibration from them.

A measurement is recorded as soon as it ends.
"""
