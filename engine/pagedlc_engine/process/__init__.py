"""An engine in a process of its own: ``host`` is the user's side, ``child`` the engine's."""
