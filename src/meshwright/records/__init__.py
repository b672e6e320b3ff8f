"""Files of measurements. They are written line by line and read back strictly."""
