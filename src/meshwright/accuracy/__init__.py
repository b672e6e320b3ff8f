"""Predictions of published runs compared with their measurements.

csvfile, rows, shapes, software, layout, duplicates, reasons   reading: a row becomes the conditions of a run
shipped                                                        files of published runs in the package
tables, predict                                                predictions of many runs at once
metrics, failed, report, export                                errors, and the report
"""
