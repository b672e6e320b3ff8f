"""Is this node healthy and as fast as it should be, and how is it tuned.

host        everything that is read from a node: files under a root folder, commands
settings    kernel settings that matter to training, as data: what they are, what they should be, why
tuning      change them and put them back, all or none
"""
