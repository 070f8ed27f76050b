"""What the user gives is looked at before anything is charged, and what breaks off is explained."""
