"""pwjax: Mixture-of-Experts serving in JAX under one memory budget."""
