"""The ways into a session: the functions of `sonde`, the decorator, `sonde run`, trainers."""
