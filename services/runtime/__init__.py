"""What every process of the mesh is made of: server, channels, control stream, telemetry."""
