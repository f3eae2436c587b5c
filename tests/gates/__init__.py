"""Tests of the gates that anybody's engine can be put through: the plugin, the adapters at hand, and broken engines that each gate must find."""
