//! The driver against the real kernel, without a worker.
