"""The panels: pure drawing from one `PanelState`, and the widgets that hold it."""
