"""Page table: the changes of a step, written into the table on the device."""
