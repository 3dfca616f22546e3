"""Devices of other machines, over Ray.

    here                                              there: an actor on each machine
    RayDevice, RayBuffer, RayBackend, RayPlan         devices, buffers, streams, plans of any backend
            │  handles                                        ▲  looked up and checked
            ▼                                                 │
    Link    commands collected, one call ─────────────▶ Node.run    JSON, and bytes
            results, references to data  ◀─────────────
                                                        Node ──▶ Node   copies, through the object store

`ggmlb.connect` starts the actors (`cluster`) and registers their devices. Ray is imported then.
"""
