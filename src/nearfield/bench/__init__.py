"""What the commands do: look at this machine, explain a plan, measure attend, draw a picture."""
