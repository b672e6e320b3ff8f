"""Health and speed of a node against expected values, and its kernel settings.

host        access to a node: files under a root folder, commands
devices/    accelerators as drivers and the PCI bus report them, one vendor a file
verdict     results of checks, and the limits that they apply (data/limits.toml)
checks/     the checks, one group a file
expected    rates that the catalogue expects of a device;  measure: measured rates, in a separate process
examine     all checks of one node -> a report
compare     reports of many nodes -> outliers, hosts to exclude
settings    kernel settings that affect training, as data: current and target values, with reasons
tuning      change the settings and restore them, all or none
"""
