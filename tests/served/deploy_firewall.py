"""A deploy for test_firewall.py: the firewall's role alone, as deploys/serve.py runs it."""

from roles.firewall.deploy import firewall

firewall()
