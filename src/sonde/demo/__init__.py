"""`sonde demo`: small trainings with one planted fault each, and the same trainings repaired."""
