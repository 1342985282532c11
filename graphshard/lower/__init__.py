"""From a scheduled graph to something that can be called: operators, Inductor code, or AOTInductor packages."""
