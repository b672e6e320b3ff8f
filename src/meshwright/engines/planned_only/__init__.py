"""`engine: any`: plans that are estimated whatever program would run them, and that nothing here trains."""
