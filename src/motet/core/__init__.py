"""Plain, immutable, serialisable data that every other layer reads. Free of torch."""
