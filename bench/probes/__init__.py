"""One-off measurements that decide kernel forms; nothing here is imported by an engine."""
