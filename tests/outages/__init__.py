"""The two outages that this project exists for, replayed: red with the old bound, green with ours, and a control that never shows them."""
