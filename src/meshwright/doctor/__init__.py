"""Is this node healthy and as fast as it should be, and how is it tuned.

host        everything that is read from a node: files under a root folder, commands
devices/    accelerators as their drivers and the bus report them, one vendor a file
verdict     what a check answers, and the limits that it judges by (data/limits.toml)
checks/     what is asked, one group a file
expected    what the catalogue expects of a device;  measure: what it does, in a process of its own
examine     all checks of one node -> a document
compare     documents of many nodes -> outliers, hosts to leave out
settings    kernel settings that matter to training, as data: what they are, what they should be, why
tuning      change them and put them back, all or none
"""
