"""Entry points of a session: the functions of `sonde`, the decorator, `sonde run`, trainers, other frameworks."""
