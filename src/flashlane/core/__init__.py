"""What is asked, who can run it, who does."""
