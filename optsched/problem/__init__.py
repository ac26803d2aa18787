"""What is scheduled and what a schedule is: requests, limits, decisions, and their errors."""
