"""The experts of every token, from the router's logits."""
