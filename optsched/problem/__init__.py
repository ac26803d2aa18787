"""What is scheduled, and what a schedule is: requests, limits, decisions, and errors about them."""
