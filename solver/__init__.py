"""The combinatorial side of the planner: integers, divisors and limits; it knows no GPU and no model."""
