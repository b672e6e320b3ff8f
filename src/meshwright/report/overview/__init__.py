"""One report of many records: `meshwright report`."""
