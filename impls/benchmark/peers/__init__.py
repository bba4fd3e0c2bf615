"""One generation of an evolution strategy, by esbench's populations and by other libraries."""
