# Data for every host of every inventory in this folder; a host's own data wins.

# pyinfra has no deadline of its own: a host that vanishes in the middle of a command would hang the whole run.
_timeout = 900
