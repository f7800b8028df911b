"""What learns: rewards become advantages, advantages become gradients. Never sees an environment or a tool."""
