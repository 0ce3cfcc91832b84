"""Who looks at what is recorded, on the writer's thread: live rules, mirrors, non-finite values."""
