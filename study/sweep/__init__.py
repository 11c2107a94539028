"""Many runs from one suite file: planned, launched one after another, judged, and never done twice."""
