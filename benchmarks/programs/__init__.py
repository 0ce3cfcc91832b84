"""Training programs composed from architecture, task, optimizer, schedule, style and fault, with known root causes."""
