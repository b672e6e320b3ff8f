"""The source documents as one report: `meshwright report sources`."""
