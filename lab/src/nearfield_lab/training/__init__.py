"""Training: pictures to latents, flow matching from scratch, distillation into sparse attention."""
