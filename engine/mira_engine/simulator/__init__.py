"""The policies on a virtual clock, fed by routing traces. No torch, no device, no waiting."""
