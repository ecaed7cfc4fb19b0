"""The two device operations of pwjax, each with a reference in plain jnp and a Pallas kernel."""
