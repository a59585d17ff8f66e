"""What on call asks of a deployment, asked of a real one."""
