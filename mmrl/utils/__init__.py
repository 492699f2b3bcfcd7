"""Files, plug-ins and other helpers without a package of their own."""
