"""The functions of `import meshwright`, one module each. Import them from `meshwright` itself."""
