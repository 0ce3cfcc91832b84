"""Keras 3 on TensorFlow, JAX or torch: `model.fit(x, y, callbacks=[SondeCallback(project="mnist")])`."""

from sonde.adapters.keras.callback import (
    SondeCallback,
    check_watch,
    record_class,
    record_fits,
    record_model,
    watch_model,
)

__all__ = ["SondeCallback", "check_watch", "record_class", "record_fits", "record_model", "watch_model"]
